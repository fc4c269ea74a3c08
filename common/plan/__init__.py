"""What will a run need: memory by part, bytes sent, time; `--plan`."""
