"""Reports: what the metrics of one run say, and how several compare, as HTML."""
