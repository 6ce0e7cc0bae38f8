"""The inference engine: transformers models on the tiered cache. Importing it pulls in no torch."""
