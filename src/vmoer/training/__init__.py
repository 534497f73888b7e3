"""The parts of training: data, objective, loop, telemetry, checkpoints, LoRA targets. `vmoer.train` puts them together."""
