"""Generic calls: run, plan, bind and launch any operation."""
