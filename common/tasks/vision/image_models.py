"""Small image classifiers that transformers does not provide; after this import, `from_pretrained` loads them."""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    PreTrainedConfig,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
)
from transformers.modeling_outputs import ImageClassifierOutput

from common.tasks.vision.batch_norm import use_group_norm

LUMA = (0.299, 0.587, 0.114)  # weights of R, G, B in gray (ITU-R 601), as in PIL


def in_channels_of(config: PreTrainedConfig, pixel_values: torch.Tensor) -> torch.Tensor:
    """Returns images (N, C, H, W), from RGB to gray for a model with one channel, because pipelines always pass RGB."""
    if config.num_channels == pixel_values.shape[1] or pixel_values.shape[1] != len(LUMA):
        return pixel_values
    return torch.einsum("nchw,c->nhw", pixel_values, pixel_values.new_tensor(LUMA)).unsqueeze(1)


class ConvNetConfig(PreTrainedConfig):
    model_type = "mnist_convnet"
    turns_rgb_gray = True  # the model accepts RGB too (`in_channels_of`)

    num_channels: int = 1
    image_size: list[int] | tuple[int, ...] = (28, 28)  # height, width
    hidden_size: int = 128
    dropout: float = 0.25


class ConvNet(PreTrainedModel):
    """The ConvNet of the MNIST guides: two 3 x 3 convolutions, max pooling, a hidden layer. It has no norm layer."""

    config_class, main_input_name, base_model_prefix = ConvNetConfig, "pixel_values", "features"
    _no_split_modules: list[str] = []  # FSDP2 shards the model as one unit

    def __init__(self, config: ConvNetConfig):
        super().__init__(config)
        height, width = ((side - 4) // 2 for side in config.image_size)
        self.features = nn.Sequential(
            nn.Conv2d(config.num_channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(config.dropout),
            nn.Flatten(),
            nn.Linear(64 * height * width, config.hidden_size),
            nn.ReLU(),
            nn.Dropout(2 * config.dropout),
        )
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)  # type: ignore[arg-type]  # never None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()  # torch's initialisation, because transformers' is for language models

    def get_input_embeddings(self) -> None:  # type: ignore[override]  # there are none
        return None

    def forward(self, pixel_values: torch.Tensor) -> ImageClassifierOutput:
        """Returns the logits of `pixel_values` (N, channels, height, width)."""
        pixel_values = in_channels_of(self.config, pixel_values)
        return ImageClassifierOutput(logits=self.classifier(self.features(pixel_values)))


class NormResNetConfig(ResNetConfig):
    model_type = "norm_resnet"
    turns_rgb_gray = True

    norm: str = "group"  # or "batch"
    small_images: bool = False  # True: the first convolution does not reduce the resolution


class NormResNet(ResNetForImageClassification):
    """transformers' ResNet with a choice of norm, and a first layer for images of fewer than 64 pixels per side.

    It has a separate model type, because ResNetForImageClassification would silently load group norm as batch norm.
    """

    config_class = NormResNetConfig

    def __init__(self, config: NormResNetConfig):
        super().__init__(config)
        if config.small_images:
            stem: Any = self.resnet.embedder
            stem.embedder.convolution = nn.Conv2d(config.num_channels, config.embedding_size, 3, padding=1, bias=False)
            stem.pooler = nn.Identity()
        if config.norm == "group":
            use_group_norm(self)
        self.post_init()

    def forward(self, pixel_values: torch.Tensor, **kwargs: Any) -> ImageClassifierOutput:
        return super().forward(in_channels_of(self.config, pixel_values), **kwargs)

    def get_input_embeddings(self) -> None:  # type: ignore[override]  # there are none
        return None


# Registered so that --model_name_or_path accepts these models. `exist_ok` allows running a recipe several times.
for _config, _model in ((ConvNetConfig, ConvNet), (NormResNetConfig, NormResNet)):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModelForImageClassification.register(_config, _model, exist_ok=True)
