// The tables of docs/errors.md, and the check of a refusal against its row there.
#define _GNU_SOURCE  // stpcpy, stpncpy
#include <stdarg.h>

#include "suites/errors/errors.h"

enum { kOwnResult = -1 };

typedef struct {
    const char *id, *function, *argument, *rule;
    int result;  // kOwnResult: that of an earlier failure
    const char* example;
} Refusal;

// The rows of the document, by refusals.awk.
static const Refusal kRefusals[] = {
#include "refusals.inc"
};

static const Refusal* find(const char* id) {
    for (size_t i = 0; i < COUNT(kRefusals); ++i) {
        if (strcmp(kRefusals[i].id, id) == 0) return &kRefusals[i];
    }
    EP_REQUIRE(!"an id of docs/errors.md");
    return NULL;
}

// Appends a part of a row, in which each {..} becomes the next {value} of *given, or anything.
static char* append(char* text, const char* part, const char** given) {
    for (; *part != '\0'; ++part) {
        if (*part != '{') {
            *text++ = *part;
            continue;
        }
        part = strchr(part, '}');
        const char* value = **given == '{' ? *given + 1 : "*}";
        const size_t length = strcspn(value, "}");
        text = stpncpy(text, value, length);
        if (**given == '{') *given += length + 2;
    }
    return text;
}

// Addresses are others than in the document.
static char* append_example(char* text, const char* example) {
    while (*example != '\0') {
        const bool is_address = strncmp(example, "0x", 2) == 0;
        if (is_address) example += 1 + strspn(example + 1, "x0123456789abcdef");
        if (is_address) text = stpcpy(text, "0x*");
        else *text++ = *example++;
    }
    return text;
}

static void write_text(const Refusal* row, const char* given, char* text) {
    if (strncmp(given, "ncclEp", 6) == 0) {
        const size_t length = strcspn(given, " ");
        text = stpncpy(text, given, length);
        given += length + (given[length] == ' ');
    } else {
        text = stpcpy(append(text, row->function, &given), ":");
    }
    *text++ = ' ';
    if (*row->argument != '\0') text = stpcpy(append(text, row->argument, &given), ": ");
    text = append(text, row->rule, &given);
    given += *given == ' ';
    if (*given != '\0') {
        text = stpcpy(stpcpy(stpcpy(text, " ("), given), ")");
    } else if (strncmp(row->example, "got ", 4) == 0) {
        text = stpcpy(append_example(stpcpy(text, " ("), row->example), ")");
    }
    *text = '\0';
}

const char* write_refusal(const char* id, const char* given, char text[kMostText]) {
    write_text(find(id), given, text);
    return strstr(text, ": ") + 2;
}

bool fits(const char* text, const char* pattern) {
    if (*pattern == '*') return fits(text, pattern + 1) || (*text != '\0' && fits(text + 1, pattern));
    if (*pattern == '\0' || *text == '\0') return *pattern == *text;
    return *pattern == *text && fits(text + 1, pattern + 1);
}

void forget_last_error(void) { (void)ncclEpGetVersion(NULL); }

static bool check(EpSite site, ncclResult_t actual, ncclResult_t expected, const char* pattern) {
    const bool code = ep_check_result(site, actual, expected);
    const bool text = fits(ep_last_error(), pattern);
    if (!text) fprintf(stderr, "got:      %s\nexpected: %s\n", ep_last_error(), pattern);
    // The library must not set the program's own last error.
    const bool cuda = ep_check_cuda(site, cudaGetLastError());
    return ep_check(site, text) && code && cuda;
}

bool check_refused(EpSite site, ncclResult_t actual, ncclResult_t own, const char* format, ...) {
    char given[kMostText / 2], pattern[kMostText];
    va_list values;
    va_start(values, format);
    vsnprintf(given, sizeof(given), format, values);
    va_end(values);
    const Refusal* row = find(site.expression);
    write_text(row, given, pattern);
    return check(site, actual, row->result == kOwnResult ? own : (ncclResult_t)row->result, pattern);
}

bool check_text(EpSite site, ncclResult_t actual, const char* format, ...) {
    char pattern[kMostText];
    va_list values;
    va_start(values, format);
    vsnprintf(pattern, sizeof(pattern), format, values);
    va_end(values);
    return check(site, actual, (ncclResult_t)find(site.expression)->result, pattern);
}
