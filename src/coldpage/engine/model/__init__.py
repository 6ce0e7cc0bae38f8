"""A transformers model, what it keeps of a token, and the codecs and means that suit it."""
