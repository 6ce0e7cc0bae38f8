"""What codecs cost in quality, size and time, on real models and real text."""
