"""Where torchtext has its tokenizers."""
