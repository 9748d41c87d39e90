import java.nio.file.Path;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.MiniDFSCluster;

/** A name node and a data node, with WebHDFS: java -cp … Hdfs.java FOLDER PORT. */
public class Hdfs {
    public static void main(String[] arguments) throws Exception {
        Path folder = Path.of(arguments[0]);
        Configuration settings = new Configuration();
        settings.set("hadoop.tmp.dir", folder.resolve("tmp").toString());
        settings.set(MiniDFSCluster.HDFS_MINIDFS_BASEDIR, folder.resolve("data").toString());
        new MiniDFSCluster.Builder(settings)
            .nameNodeHttpPort(Integer.parseInt(arguments[1]))
            .numDataNodes(1)
            .build()
            .waitActive();
        Thread.currentThread().join();
    }
}
