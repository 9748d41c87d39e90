"""The status page (`anabranch serve`): reports of all streams as HTML without external
resources."""
