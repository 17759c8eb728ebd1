"""Problems to measure: cases, lists of shapes, configurations, peers."""
