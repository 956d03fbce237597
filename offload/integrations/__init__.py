"""Where other programs meet the engine: progress lines, signals, Hugging Face's `Trainer`."""
