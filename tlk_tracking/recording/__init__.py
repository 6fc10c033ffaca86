"""From a training step to a raw window; torch is used here."""
