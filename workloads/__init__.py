"""What to send: recorded or synthetic agent sessions, and the content of their prompts."""
