"""Weight synchronization: versions, their manifests, transports, and one acknowledgement per receiver."""
