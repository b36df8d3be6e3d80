/* frame.h - the 52-byte header in front of every payload. docs/WIRE.md is the specification.
 *
 *   0 magic u16 | 2 version u8 | 3 type u8 | 4 epoch u32 | 8 seq u64 | 16 fingerprint u64
 *   24 chunk u32 | 28 segment u32 | 32 step u16 | 34 flags u16 | 36 length u32
 *   40 consumed u32 | 44 crc32c of the payload u32 | 48 crc32c of bytes 0-47 u32
 *   little-endian
 *
 * The header has a checksum of its own, because its fields are used before the payload has come:
 * one flipped bit of length would have the receiver wait for bytes that never come. It covers the
 * payload's checksum, so the two belong together. It is checked before any field is used.
 *
 * frame_decode checks the bounds that need no knowledge of the collective; the owner of the
 * collective checks the rest before use. Pure: no state, no OS, no allocation.
 */
#ifndef RINGCOMM_FRAME_H
#define RINGCOMM_FRAME_H

#include <stddef.h>
#include <stdint.h>

#include "../include/ringcomm.h"

enum { FRAME_HEADER_BYTES = 52, FRAME_TEXT_BYTES = 404 };

typedef enum frame_type {
    FRAME_DATA = 1,      /* a segment */
    FRAME_CALL = 2,      /* "I have called collective seq": announces it and grants credit */
    FRAME_HEARTBEAT = 3, /* "I live, and have called all collectives below seq" */
    FRAME_GOODBYE = 4,   /* the last frame of a lane: seq and all after it will not be called */
    FRAME_ABORT = 5,     /* payload: why (frame_abort) */
    FRAME_LANE_DOWN = 6, /* "I have given up lane `chunk`, on which `segment` frames came" */
    FRAME_PROBE = 7      /* payload: nothing; the receiver tells how fast it came */
} frame_type;

/* Flags. P2P: seq counts the sends between these two ranks. ASKS, of a heartbeat: the peer is to
 * answer on this lane at once, since the answer has the number of frames that have come; of a call
 * with P2P: it is the sender's, who holds back send seq until the peer has called its receive. */
enum { FRAME_P2P = 1, FRAME_ASKS = 2 };

typedef struct frame_header {
    uint8_t type;
    uint16_t step;
    uint16_t flags;
    uint32_t epoch;
    uint64_t seq;
    uint64_t fingerprint;
    uint32_t chunk;
    uint32_t segment;
    uint32_t length;   /* of the payload, in bytes */
    uint32_t consumed; /* data bytes of this link taken by called collectives, modulo 2^32 */
} frame_header;

/* Returns 1 if the payload may be as large as a segment. */
static inline int frame_is_long(const frame_header *h)
{
    return h->type == FRAME_DATA || h->type == FRAME_PROBE;
}

/* Writes the header with the CRCs of the payload and of itself. */
void frame_encode(uint8_t bytes[FRAME_HEADER_BYTES], const frame_header *h, const void *payload);

/* Reads a header. Returns RC_PROTOCOL, with the reason in error, if its CRC does not match, or if
 * magic, version, type, flags, epoch or length is invalid; *crc is to be given to frame_check. */
rc_result frame_decode(const uint8_t bytes[FRAME_HEADER_BYTES], uint32_t epoch, uint32_t max_length,
                       frame_header *h, uint32_t *crc, rc_error *error);
/* Returns 1 if crc is the CRC of this payload. */
int frame_check(const void *payload, uint32_t length, uint32_t crc);

/* Payload of FRAME_ABORT: the failure that its receivers raise, and the rank that found it, which
 * need not be the sender, as ranks pass it on. */
uint32_t frame_abort_encode(uint8_t *payload, const rc_error *error, int origin);
void frame_abort_decode(const uint8_t *payload, uint32_t length, rc_error *error, int *origin);

#endif
