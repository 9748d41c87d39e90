import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Records by Kafka's own client: java -cp … Send.java BOOTSTRAP TOPIC. Each line of its input is a record (see
 * foreign_producers.py); of each it prints the partition and offset that the brokers acknowledged.
 */
public class Send {
    static byte[] unpack(String field) {
        return field.equals("-") ? null : Base64.getDecoder().decode(field);
    }

    public static void main(String[] arguments) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", arguments[0]);
        settings.put("compression.type", "zstd");
        settings.put("key.serializer", ByteArraySerializer.class.getName());
        settings.put("value.serializer", ByteArraySerializer.class.getName());
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(settings)) {
            for (String line = input.readLine(); line != null; line = input.readLine()) {
                String[] field = line.split("\t", -1);
                ProducerRecord<byte[], byte[]> record = new ProducerRecord<>(
                    arguments[1], Integer.parseInt(field[0]), Long.parseLong(field[1]), unpack(field[2]), unpack(field[3]));
                for (String pair : field[4].isEmpty() ? new String[0] : field[4].split(",")) {
                    String[] header = pair.split(":", -1);
                    record.headers().add(new String(unpack(header[0]), StandardCharsets.UTF_8), unpack(header[1]));
                }
                RecordMetadata sent = producer.send(record).get();
                System.out.println(sent.partition() + " " + sent.offset());
            }
        }
    }
}
