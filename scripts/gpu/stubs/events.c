/* The log of all stub libraries: they are one shared object, which is linked to by each library's name. */
#include "events.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *text;
static size_t used, space;

void stub_note(const char *form, ...)
{
    char line[1024];
    va_list rest;
    va_start(rest, form);
    vsnprintf(line, sizeof line, form, rest);
    va_end(rest);
    size_t length = strlen(line);
    pthread_mutex_lock(&lock);
    if (used + length + 2 > space) {
        space = 2 * (used + length + 2);
        text = realloc(text, space);
        if (!text)
            abort();
    }
    memcpy(text + used, line, length);
    memcpy(text + used + length, "\n", 2);
    used += length + 1;
    pthread_mutex_unlock(&lock);
}

/* Lines since the last call, which stay valid until the next call of a stub. */
const char *stub_take_events(void)
{
    pthread_mutex_lock(&lock);
    const char *taken = used ? text : "";
    used = 0;
    pthread_mutex_unlock(&lock);
    return taken;
}
