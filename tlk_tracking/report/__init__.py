"""From numbers and verdicts to texts, pages and timelines."""
