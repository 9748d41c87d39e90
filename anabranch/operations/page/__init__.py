"""The status page (`anabranch serve`): what the views say of all streams, as HTML that asks nothing of elsewhere."""
