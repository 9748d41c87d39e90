// Records by kafkajs: node send.js BOOTSTRAP TOPIC. Each line of its input is a record (see foreign_producers.py); of
// each it prints the partition and offset that the brokers acknowledged.
const { CompressionTypes, Kafka, logLevel } = require("kafkajs");
const [bootstrap, topic] = process.argv.slice(2);

const unpack = (field) => (field === "-" ? null : Buffer.from(field, "base64"));

async function main() {
  const kafka = new Kafka({ brokers: bootstrap.split(","), logLevel: logLevel.ERROR });
  const producer = kafka.producer({ allowAutoTopicCreation: false });
  await producer.connect();
  const lines = require("fs").readFileSync(0, "utf8").split("\n").filter(Boolean);
  for (const line of lines) {
    const [partition, timestamp, key, value, packed] = line.split("\t");
    const headers = {};
    for (const pair of packed.split(",").filter(Boolean)) {
      const [name, content] = pair.split(":");
      headers[unpack(name).toString()] = unpack(content);
    }
    const message = { partition: Number(partition), timestamp, key: unpack(key), value: unpack(value), headers };
    const [sent] = await producer.send({ topic, acks: -1, compression: CompressionTypes.GZIP, messages: [message] });
    console.log(`${sent.partition} ${sent.baseOffset}`);
  }
  await producer.disconnect();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
