import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Kafka's own producer: java -cp … Produce.java BOOTSTRAP TIMESTAMP. Each line of its input is a record: topic,
 * partition, codec and value, with tabs between.
 */
public class Produce {
    static KafkaProducer<byte[], byte[]> open(String bootstrapServers, String codec) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", bootstrapServers);
        settings.put("compression.type", codec);
        settings.put("linger.ms", "1000");
        settings.put("key.serializer", ByteArraySerializer.class.getName());
        settings.put("value.serializer", ByteArraySerializer.class.getName());
        return new KafkaProducer<>(settings);
    }

    public static void main(String[] arguments) throws Exception {
        long timestamp = Long.parseLong(arguments[1]);
        Map<String, KafkaProducer<byte[], byte[]>> producers = new HashMap<>();
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            String[] field = line.split("\t", 4);
            producers.computeIfAbsent(field[2], codec -> open(arguments[0], codec)).send(new ProducerRecord<>(
                field[0], Integer.parseInt(field[1]), timestamp, null, field[3].getBytes(StandardCharsets.UTF_8)));
        }
        producers.values().forEach(KafkaProducer::close);
    }
}
