// A test that hangs must say where. SIGALRM ends the process after the deadline and prints the case and the last check
// that it had reached. The handler only calls functions that POSIX allows in a handler.
#define _GNU_SOURCE  // sigaction, gethostname
#include <errno.h>
#include <signal.h>
#include <unistd.h>

#include "base.h"

enum { kHungStatus = 124, kOtherRanksSeconds = 1 };

static char g_who[64];
static const char* volatile g_case;
static const char* volatile g_file;
static volatile sig_atomic_t g_line;
static volatile sig_atomic_t g_waiting;

static void put(const char* text) {
    size_t left = strlen(text);
    while (left > 0) {
        const ssize_t written = write(STDERR_FILENO, text, left);
        if (written < 0 && errno != EINTR) return;
        if (written > 0) {
            text += written;
            left -= (size_t)written;
        }
    }
}

static void put_number(unsigned value) {
    char digits[16];
    size_t at = sizeof(digits) - 1;
    digits[at] = '\0';
    do {
        digits[--at] = (char)('0' + value % 10);
        value /= 10;
    } while (value > 0 && at > 0);
    put(&digits[at]);
}

static void on_alarm(int signal_number) {
    (void)signal_number;
    put(g_who);
    if (g_case != NULL) {
        put(", case ");
        put(g_case);
    }
    if (g_waiting) {
        put(", done with it and waiting for the other ranks");
    } else if (g_file != NULL) {
        put(", last check reached: ");
        put(g_file);
        put(":");
        put_number((unsigned)g_line);
    }
    put("\n");
    // The launcher kills all processes once one ends; the others print first.
    sleep(kOtherRanksSeconds);
    _exit(kHungStatus);
}

void ep_watchdog_arm(const EpEnv* env, unsigned seconds) {
    char host[24] = "?";
    gethostname(host, sizeof(host) - 1);
    snprintf(g_who, sizeof(g_who), "[rank %d of %d on %s] hung", env->rank, env->size, host);
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = on_alarm;
    sigaction(SIGALRM, &action, NULL);
    alarm(seconds);
}

unsigned ep_watchdog_default(unsigned otherwise) {
    const char* text = getenv("EP_TEST_DEADLINE");
    if (text == NULL || text[0] == '\0') return otherwise;
    char* end = NULL;
    const unsigned long seconds = strtoul(text, &end, 10);
    const bool valid = *end == '\0' && text[0] != '-' && seconds <= 1000000;
    if (!valid) fprintf(stderr, "EP_TEST_DEADLINE=%s is not a number of seconds\n", text);
    return valid ? (unsigned)seconds : otherwise;
}

void ep_watchdog_at_case(const char* name) {
    g_case = name;
    g_waiting = 0;
}

void ep_watchdog_case_done(void) { g_waiting = 1; }

void ep_watchdog_at_site(const char* file, int line) {
    g_file = file;
    g_line = line;
}
