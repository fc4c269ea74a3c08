"""What the recipes share: plain functions and small dataclasses, one question a module, no recipe imported."""
