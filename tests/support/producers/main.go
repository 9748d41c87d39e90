// Records by the clients of Go: producers franz-go|sarama BOOTSTRAP TOPIC.
//
// Each line of its input is a record (see foreign_producers.py); of each it prints the partition and offset that the
// brokers acknowledged.
package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/IBM/sarama"
	"github.com/twmb/franz-go/pkg/kgo"
)

type header struct{ name, value []byte }

type record struct {
	partition  int32
	timestamp  time.Time
	key, value []byte
	headers    []header
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func unpack(field string) []byte {
	if field == "-" {
		return nil
	}
	value, err := base64.StdEncoding.DecodeString(field)
	check(err)
	return value
}

func read() []record {
	var records []record
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		field := strings.Split(lines.Text(), "\t")
		partition, err := strconv.Atoi(field[0])
		check(err)
		millis, err := strconv.ParseInt(field[1], 10, 64)
		check(err)
		one := record{int32(partition), time.UnixMilli(millis), unpack(field[2]), unpack(field[3]), nil}
		for _, pair := range strings.Split(field[4], ",") {
			if name, value, found := strings.Cut(pair, ":"); found {
				one.headers = append(one.headers, header{unpack(name), unpack(value)})
			}
		}
		records = append(records, one)
	}
	check(lines.Err())
	return records
}

func franz(bootstrap, topic string, records []record) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(strings.Split(bootstrap, ",")...),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerBatchCompression(kgo.SnappyCompression()),
	)
	check(err)
	defer client.Close()
	for _, one := range records {
		sent := &kgo.Record{Topic: topic, Partition: one.partition, Timestamp: one.timestamp, Key: one.key, Value: one.value}
		for _, h := range one.headers {
			sent.Headers = append(sent.Headers, kgo.RecordHeader{Key: string(h.name), Value: h.value})
		}
		got, err := client.ProduceSync(context.Background(), sent).First()
		check(err)
		fmt.Println(got.Partition, got.Offset)
	}
}

func bySarama(bootstrap, topic string, records []record) {
	settings := sarama.NewConfig()
	settings.Version = sarama.V3_6_0_0
	settings.Producer.RequiredAcks = sarama.WaitForAll
	settings.Producer.Partitioner = sarama.NewManualPartitioner
	settings.Producer.Compression = sarama.CompressionLZ4
	settings.Producer.Return.Successes = true
	producer, err := sarama.NewSyncProducer(strings.Split(bootstrap, ","), settings)
	check(err)
	defer producer.Close()
	for _, one := range records {
		sent := &sarama.ProducerMessage{Topic: topic, Partition: one.partition, Timestamp: one.timestamp}
		if one.key != nil {
			sent.Key = sarama.ByteEncoder(one.key)
		}
		if one.value != nil {
			sent.Value = sarama.ByteEncoder(one.value)
		}
		for _, h := range one.headers {
			sent.Headers = append(sent.Headers, sarama.RecordHeader{Key: h.name, Value: h.value})
		}
		partition, offset, err := producer.SendMessage(sent)
		check(err)
		fmt.Println(partition, offset)
	}
}

func main() {
	send := map[string]func(string, string, []record){"franz-go": franz, "sarama": bySarama}[os.Args[1]]
	send(os.Args[2], os.Args[3], read())
}
