// Reads an NCCL log; see log.h.
#include "net_plugin/log.h"

#include <stdio.h>
#include <string.h>

enum { kLineBytes = 4096 };

static void count_channel(const char* line, NetLog* log) {
    static const char plugin[] = " via NET/" NET_PLUGIN_NAME "/";
    const char* channel = strstr(line, "Channel ");
    const char* via = channel != NULL ? strstr(channel, " via ") : NULL;
    if (via == NULL) return;
    if (strncmp(via, plugin, sizeof(plugin) - 1) == 0) {
        ++log->channels;
    } else {
        ++log->other_channels;
    }
}

static void count_connection(const char* line, NetLog* log) {
    const char* ours = strstr(line, "NET/" NET_PLUGIN_NAME ": ");
    unsigned long long bytes = 0;
    unsigned long long messages = 0;
    if (ours == NULL) return;
    if (sscanf(ours, NET_LOG_SENT, &bytes, &messages) == 2) {
        log->sent_bytes += bytes;
        log->sent_messages += messages;
    } else if (sscanf(ours, NET_LOG_RECEIVED, &bytes, &messages) == 2) {
        log->received_bytes += bytes;
        log->received_messages += messages;
    }
}

bool net_log_read(const char* path, NetLog* log) {
    memset(log, 0, sizeof(*log));
    FILE* file = fopen(path, "r");
    if (file == NULL) return false;
    char line[kLineBytes];
    while (fgets(line, sizeof(line), file) != NULL) {
        count_channel(line, log);
        count_connection(line, log);
    }
    const bool read = ferror(file) == 0;
    fclose(file);
    return read;
}
