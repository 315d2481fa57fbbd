"""The exchange inside other libraries' models; each module needs its library."""
