"""The status page (`anabranch page`): reports of all streams as HTML without external
resources."""
