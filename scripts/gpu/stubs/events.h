/* What the provider asked of the stub libraries, one line per call, for a test to read.
 *
 * A line is a kind and what it concerns, for example "launch flash_fwd_kernel" or "copy host_to_device 24".
 */
#ifndef OUTRIDER_STUB_EVENTS_H
#define OUTRIDER_STUB_EVENTS_H

/* Note one call, in the form of printf. */
void stub_note(const char *form, ...) __attribute__((format(printf, 1, 2)));

#endif
