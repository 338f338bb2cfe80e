// The lines that the plugin writes to NCCL's log, and what a test reads out of such a log.
#ifndef C_TESTS_NET_PLUGIN_LOG_H_
#define C_TESTS_NET_PLUGIN_LOG_H_

#include <stdbool.h>
#include <stdint.h>

#define NET_PLUGIN_NAME "EP-test"

// One line for each connection when it is closed. Formats of printf and of scanf.
#define NET_LOG_SENT "NET/" NET_PLUGIN_NAME ": sent %llu bytes in %llu messages"
#define NET_LOG_RECEIVED "NET/" NET_PLUGIN_NAME ": received %llu bytes in %llu messages"

typedef struct {
    uint64_t channels;        // lines of a channel over the plugin
    uint64_t other_channels;  // and over anything else
    uint64_t sent_bytes, sent_messages, received_bytes, received_messages;  // of all connections
} NetLog;

// False if the file cannot be read.
bool net_log_read(const char* path, NetLog* log);

#endif  // C_TESTS_NET_PLUGIN_LOG_H_
