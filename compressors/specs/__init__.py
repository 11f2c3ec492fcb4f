"""From spec strings to compressors: the registry, the parser, routes by parameter name."""
