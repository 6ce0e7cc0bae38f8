"""Kits that prove devices, codecs and the whole manager; third parties subclass and run them."""
