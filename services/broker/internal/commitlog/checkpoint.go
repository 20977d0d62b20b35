package commitlog

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
)

const (
	checkpointMagic = "BRAIDCP1"
	// checkpointFixed is everything but the lineage entries and the CRC.
	checkpointFixed = 8 + 4 + 8 + 24 + 24 + 1 + 24 + 8 + 16 + 4
	lineageEntryLen = 16
)

// border is a batch border: an offset and the chain hash of all before it.
type border struct {
	offset int64
	chain  chainhash.Hash
}

// pendingOp is a change of the log that was begun and must be finished by Open.
type pendingOp uint8

const (
	opNone     pendingOp = iota
	opTruncate           // remove everything at and above pending.offset
	opReset              // remove everything, start again at pending.offset
)

// cleanEnd is how a clean close left the log.
type cleanEnd struct {
	offset int64 // log end, -1 without a clean close
	size   int64 // bytes of the last segment
}

// checkpoint is the content of log.checkpoint: all facts about a log that can't
// be derived from its segments. It is always replaced as a whole, which makes
// each replacement a commit point.
type checkpoint struct {
	start    int64  // log start; may lie inside of the first segment
	first    border // base of the first segment
	recovery border // everything below was synced once
	op       pendingOp
	pending  border // where op puts the log end
	// pendingPosition is where pending lies in the segment below it; 0 when no
	// segment is cut.
	pendingPosition int64
	clean           cleanEnd
	lineage         lineage.Lineage
}

func (c *checkpoint) encode() []byte {
	b := make([]byte, 0, checkpointFixed+lineageEntryLen*len(c.lineage)+4)
	b = append(b, checkpointMagic...)
	b = binary.BigEndian.AppendUint32(b, FormatVersion)
	b = binary.BigEndian.AppendUint64(b, uint64(c.start))
	b = appendBorder(b, c.first)
	b = appendBorder(b, c.recovery)
	b = append(b, byte(c.op))
	b = appendBorder(b, c.pending)
	b = binary.BigEndian.AppendUint64(b, uint64(c.pendingPosition))
	b = binary.BigEndian.AppendUint64(b, uint64(c.clean.offset))
	b = binary.BigEndian.AppendUint64(b, uint64(c.clean.size))
	b = binary.BigEndian.AppendUint32(b, uint32(len(c.lineage)))
	for _, e := range c.lineage {
		b = binary.BigEndian.AppendUint32(b, e.Incarnation)
		b = binary.BigEndian.AppendUint32(b, uint32(e.LeaderEpoch))
		b = binary.BigEndian.AppendUint64(b, uint64(e.StartOffset))
	}
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func decodeCheckpoint(b []byte) (checkpoint, error) {
	var c checkpoint
	body, err := checkedBody(b, checkpointMagic, checkpointFixed)
	if err != nil {
		return c, err
	}
	c.start = int64(binary.BigEndian.Uint64(body[12:]))
	c.first = readBorder(body[20:])
	c.recovery = readBorder(body[44:])
	c.op = pendingOp(body[68])
	c.pending = readBorder(body[69:])
	c.pendingPosition = int64(binary.BigEndian.Uint64(body[93:]))
	c.clean.offset = int64(binary.BigEndian.Uint64(body[101:]))
	c.clean.size = int64(binary.BigEndian.Uint64(body[109:]))
	n := int64(binary.BigEndian.Uint32(body[117:]))
	rest := body[checkpointFixed:]
	if int64(len(rest)) != n*lineageEntryLen {
		return c, &FormatError{Reason: fmt.Sprintf("%d bytes for %d lineage entries", len(rest), n)}
	}
	for ; len(rest) > 0; rest = rest[lineageEntryLen:] {
		c.lineage = append(c.lineage, lineage.Entry{
			Leadership: lineage.Leadership{
				Incarnation: binary.BigEndian.Uint32(rest),
				LeaderEpoch: int32(binary.BigEndian.Uint32(rest[4:])),
			},
			StartOffset: int64(binary.BigEndian.Uint64(rest[8:])),
		})
	}
	if err := c.validate(); err != nil {
		return c, err
	}
	return c, nil
}

// validate refuses what encode can't have been given by this package: a file
// whose checksum fits but whose facts contradict each other.
func (c *checkpoint) validate() error {
	bad := func(what string) error { return &FormatError{Reason: what} }
	switch {
	case c.first.offset < 0 || c.start < c.first.offset:
		return bad(fmt.Sprintf("log start %d below first segment %d", c.start, c.first.offset))
	case c.recovery.offset < c.first.offset:
		return bad(fmt.Sprintf("recovery point %d below first segment %d", c.recovery.offset, c.first.offset))
	case c.recovery.offset == c.first.offset && c.recovery.chain != c.first.chain:
		return bad("two chain hashes for one offset")
	case c.start > c.recovery.offset:
		return bad(fmt.Sprintf("log start %d above recovery point %d", c.start, c.recovery.offset))
	case c.op > opReset:
		return bad(fmt.Sprintf("unknown pending operation %d", c.op))
	case c.op != opNone && c.pending.offset < c.first.offset:
		return bad(fmt.Sprintf("pending operation at %d below first segment %d", c.pending.offset, c.first.offset))
	case c.pendingPosition < 0 || c.pendingPosition > maxPosition:
		return bad(fmt.Sprintf("impossible position %d", c.pendingPosition))
	case c.clean.offset < -1 || c.clean.size < 0:
		return bad("negative clean end")
	}
	if err := c.lineage.Validate(); err != nil {
		return bad(err.Error())
	}
	return nil
}

func appendBorder(b []byte, at border) []byte {
	b = binary.BigEndian.AppendUint64(b, uint64(at.offset))
	return append(b, at.chain[:]...)
}

func readBorder(b []byte) border {
	var at border
	at.offset = int64(binary.BigEndian.Uint64(b))
	copy(at.chain[:], b[8:24])
	return at
}
