"""Integrations with other programs: progress lines, signals, and Hugging Face's `Trainer`."""
