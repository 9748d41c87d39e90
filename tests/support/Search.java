import java.nio.file.Path;
import java.util.List;
import org.opensearch.common.settings.Settings;
import org.opensearch.env.Environment;
import org.opensearch.node.Node;
import org.opensearch.transport.Netty4Plugin;

/** A node of OpenSearch with its REST API: java -cp … Search.java FOLDER PORT. */
public class Search {
    static class Embedded extends Node {
        Embedded(Settings settings) {
            super(new Environment(settings, null), List.of(Netty4Plugin.class), false);
        }
    }

    public static void main(String[] arguments) throws Exception {
        Path home = Path.of(arguments[0]);
        Settings settings = Settings.builder()
            .put("path.home", home).put("path.data", home.resolve("data")).put("path.logs", home.resolve("logs"))
            .put("cluster.name", "tests").put("node.name", "one").put("discovery.type", "single-node")
            .put("transport.type", "netty4").put("http.type", "netty4")
            .put("network.host", "127.0.0.1").put("transport.port", "0").put("http.port", arguments[1])
            .put("http.max_content_length", "64kb").put("action.auto_create_index", false)
            .put("cluster.routing.allocation.disk.threshold_enabled", false)
            .build();
        new Embedded(settings).start();
        Thread.currentThread().join();
    }
}
