"""From a trace file to typed event columns."""
