"""The embedded emulator: an OpenAI-compatible server with a known truth. Never a measurement of hardware."""
