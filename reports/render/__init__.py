"""One file per output format. Each takes the analyses (the first is the report's own) and returns text."""
