"""Keys and values as packed cold pages: the formats, and their packing on the CPU and on a GPU."""
