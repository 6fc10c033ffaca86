"""The words that all rooms use: records, gaps, places, texts, errors."""
