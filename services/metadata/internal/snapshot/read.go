package snapshot

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"

	"github.com/braidlog/braid/services/metadata/state"
)

// decode reads a whole snapshot through a buffer.
func decode(r io.Reader) (*state.State, error) {
	return state.Decode(bufio.NewReaderSize(r, 256<<10))
}

// verify compares the bytes with the sum that ends them, which is cheaper than
// decoding.
func verify(r io.Reader) error {
	h := sha256.New()
	var last []byte // of what was read, not hashed yet
	buf := make([]byte, 256<<10)
	for {
		n, err := r.Read(buf)
		last = append(last, buf[:n]...)
		if keep := len(last) - state.SnapshotSumSize; keep > 0 {
			h.Write(last[:keep])
			last = append(last[:0], last[keep:]...)
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return &state.SnapshotError{Reason: "read", Cause: err}
		}
	}
	if sum := h.Sum(nil); !bytes.Equal(sum, last) {
		return &state.SnapshotError{Reason: fmt.Sprintf("SHA-256 %x, the bytes have %x", last, sum)}
	}
	return nil
}
