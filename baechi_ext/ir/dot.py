"""Text of Graphviz's language."""


def quoted(text: str) -> str:
    """As DOT's grammar has strings: quotes and backslashes escaped, new lines as \\n, and no other control character."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + "".join(c if c.isprintable() else "?" for c in escaped) + '"'
