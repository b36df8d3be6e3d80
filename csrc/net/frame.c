/* frame.c - see frame.h. */
#include "frame.h"

#include <string.h>

#include "../base/crc32c.h"
#include "../base/error.h"

enum { MAGIC = 0x4352, VERSION = 2, ABORT_FIXED_BYTES = 20, PAYLOAD_CRC = 44, HEADER_CRC = 48 };

static void put_integer(uint8_t *bytes, int width, uint64_t value)
{
    for (int i = 0; i < width; i++)
        bytes[i] = (uint8_t)(value >> 8 * i);
}

static uint64_t get_integer(const uint8_t *bytes, int width)
{
    uint64_t value = 0;
    for (int i = 0; i < width; i++)
        value |= (uint64_t)bytes[i] << 8 * i;
    return value;
}

void frame_encode(uint8_t bytes[FRAME_HEADER_BYTES], const frame_header *h, const void *payload)
{
    put_integer(bytes, 2, MAGIC);
    put_integer(bytes + 2, 1, VERSION);
    put_integer(bytes + 3, 1, h->type);
    put_integer(bytes + 4, 4, h->epoch);
    put_integer(bytes + 8, 8, h->seq);
    put_integer(bytes + 16, 8, h->fingerprint);
    put_integer(bytes + 24, 4, h->chunk);
    put_integer(bytes + 28, 4, h->segment);
    put_integer(bytes + 32, 2, h->step);
    put_integer(bytes + 34, 2, h->flags);
    put_integer(bytes + 36, 4, h->length);
    put_integer(bytes + 40, 4, h->consumed);
    put_integer(bytes + PAYLOAD_CRC, 4, crc32c(0, payload, h->length));
    put_integer(bytes + HEADER_CRC, 4, crc32c(0, bytes, HEADER_CRC));
}

static int control_length_ok(const frame_header *h)
{
    if (h->type == FRAME_ABORT)
        return h->length >= ABORT_FIXED_BYTES && h->length <= FRAME_TEXT_BYTES;
    return h->length == 0;
}

static int flags_ok(const frame_header *h)
{
    if (h->type == FRAME_CALL && h->flags == (FRAME_P2P | FRAME_ASKS))
        return 1;
    return h->flags == 0 || h->flags == (h->type == FRAME_HEARTBEAT ? FRAME_ASKS : FRAME_P2P);
}

/* Reports a header whose CRC is wrong. Its first bytes are named: they show a program that speaks
 * another protocol. */
static rc_result say_damaged(rc_error *error, unsigned magic, unsigned version)
{
    static const char damaged[] =
        "the header of a frame arrived damaged (its CRC32C does not match";
    if (magic != MAGIC)
        return error_set(error, RC_PROTOCOL, "%s; it starts with 0x%04x, not 0x%04x)", damaged,
                         magic, (unsigned)MAGIC);
    if (version != VERSION)
        return error_set(error, RC_PROTOCOL, "%s; it is of version %u, this is version %d)",
                         damaged, version, VERSION);
    return error_set(error, RC_PROTOCOL, "%s)", damaged);
}

static rc_result check_header(const uint8_t bytes[FRAME_HEADER_BYTES], rc_error *error)
{
    unsigned magic = (unsigned)get_integer(bytes, 2), version = bytes[2];
    if (crc32c(0, bytes, HEADER_CRC) != (uint32_t)get_integer(bytes + HEADER_CRC, 4))
        return say_damaged(error, magic, version);
    if (magic != MAGIC)
        return error_set(error, RC_PROTOCOL, "a frame starts with 0x%04x, not 0x%04x", magic,
                         (unsigned)MAGIC);
    if (version != VERSION)
        return error_set(error, RC_PROTOCOL, "a frame of version %u came, this is version %d",
                         version, VERSION);
    return RC_OK;
}

rc_result frame_decode(const uint8_t bytes[FRAME_HEADER_BYTES], uint32_t epoch, uint32_t max_length,
                       frame_header *h, uint32_t *crc, rc_error *error)
{
    RC_TRY(check_header(bytes, error));
    *h = (frame_header){.type = bytes[3],
                        .epoch = (uint32_t)get_integer(bytes + 4, 4),
                        .seq = get_integer(bytes + 8, 8),
                        .fingerprint = get_integer(bytes + 16, 8),
                        .chunk = (uint32_t)get_integer(bytes + 24, 4),
                        .segment = (uint32_t)get_integer(bytes + 28, 4),
                        .step = (uint16_t)get_integer(bytes + 32, 2),
                        .flags = (uint16_t)get_integer(bytes + 34, 2),
                        .length = (uint32_t)get_integer(bytes + 36, 4),
                        .consumed = (uint32_t)get_integer(bytes + 40, 4)};
    *crc = (uint32_t)get_integer(bytes + PAYLOAD_CRC, 4);
    if (h->type < FRAME_DATA || h->type > FRAME_PROBE || !flags_ok(h))
        return error_set(error, RC_PROTOCOL, "a frame of type %u with flags %u came", h->type,
                         h->flags);
    if (h->epoch != epoch)
        return error_set(error, RC_PROTOCOL, "a frame of epoch %u came in epoch %u", h->epoch,
                         epoch);
    if (frame_is_long(h) ? h->length > max_length : !control_length_ok(h))
        return error_set(error, RC_PROTOCOL, "a frame of type %u claims %u bytes", h->type,
                         h->length);
    return RC_OK;
}

int frame_check(const void *payload, uint32_t length, uint32_t crc)
{
    return crc32c(0, payload, length) == crc;
}

uint32_t frame_abort_encode(uint8_t *payload, const rc_error *error, int origin)
{
    size_t text = strnlen(error->message, FRAME_TEXT_BYTES - ABORT_FIXED_BYTES);
    put_integer(payload, 4, (uint32_t)error->code);
    put_integer(payload + 4, 4, (uint32_t)error->rank);
    put_integer(payload + 8, 8, error->seq);
    put_integer(payload + 16, 4, (uint32_t)origin);
    memcpy(payload + ABORT_FIXED_BYTES, error->message, text);
    return ABORT_FIXED_BYTES + (uint32_t)text;
}

void frame_abort_decode(const uint8_t *payload, uint32_t length, rc_error *error, int *origin)
{
    char text[FRAME_TEXT_BYTES + 1];
    uint32_t size = length - ABORT_FIXED_BYTES;
    for (uint32_t i = 0; i < size; i++) {
        uint8_t byte = payload[ABORT_FIXED_BYTES + i];
        text[i] = byte >= 32 && byte != 127 ? (char)byte : '?';
    }
    text[size] = '\0';
    uint32_t code = (uint32_t)get_integer(payload, 4);
    error_clear(error);
    error_set(error, code > RC_AGAIN && code <= RC_DEVICE ? (rc_result)code : RC_ABORTED, "%s",
              text);
    error->rank = (int32_t)get_integer(payload + 4, 4);
    error->seq = get_integer(payload + 8, 8);
    *origin = (int32_t)get_integer(payload + 16, 4);
}
