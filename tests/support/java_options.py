"""Options of the Java processes that tests start."""

# In a JVM that lives for a minute the second compiler costs more than it gives. The first one alone would have 48 MB
# for its code, which Spark fills within a few tests, and evicted code is compiled again, over and over.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
