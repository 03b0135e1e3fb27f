"""blendserve inside other engines."""
