#!/bin/sh
# Grants a principal the least rights in Kafka, for one stream:
#   acls.sh BROKERS PRINCIPAL jobs STREAM TOPIC      both jobs, and every command that reads Kafka
#   acls.sh BROKERS PRINCIPAL egress STREAM TARGET   egress to the topic TARGET
# COMMAND_CONFIG: a file with the client properties of an administrator.
set -eu
brokers=$1 principal=$2 role=$3 stream=$4 topic=$5

grant() {
  kafka-acls.sh --bootstrap-server "$brokers" ${COMMAND_CONFIG:+--command-config "$COMMAND_CONFIG"} \
    --add --allow-principal "$principal" "$@"
}

case $role in
jobs)
  grant --operation Read --operation Describe --operation DescribeConfigs --topic "$topic"
  grant --operation Read --group "anabranch-$stream"
  ;;
egress)
  name=anabranch.egress.$stream.$topic
  # Read: a transaction commits the position as offsets of this topic.
  grant --operation Read --operation Write --operation Describe --operation DescribeConfigs --topic "$topic"
  grant --operation Write --operation Describe --transactional-id "$name"
  grant --operation Read --operation Describe --group "$name"
  ;;
*)
  echo "expected jobs or egress, found $role" >&2
  exit 2
  ;;
esac
