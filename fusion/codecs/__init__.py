"""The compressors of a bucket as the codecs that a compressed collective asks for."""
