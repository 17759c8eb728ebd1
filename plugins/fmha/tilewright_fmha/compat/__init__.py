"""Problems, configurations and summaries in the form of the original system."""
