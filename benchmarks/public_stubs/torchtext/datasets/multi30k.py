"""Where the sentences are elsewhere."""

URL: dict[str, str] = {}
