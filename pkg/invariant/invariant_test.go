package invariant_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/invariant"
)

func caught(fn func()) (v *invariant.Violation) {
	defer func() {
		if r := recover(); r != nil {
			v = r.(*invariant.Violation)
		}
	}()
	fn()
	return nil
}

func TestAssertPanicsOnlyWhenEnabled(t *testing.T) {
	v := caught(func() { invariant.Assert(1 > 2, "end %d below base %d", 1, 2) })
	if !invariant.Enabled {
		assert.Nil(t, v)
		return
	}
	require.NotNil(t, v)
	assert.EqualError(t, v, "invariant violated: end 1 below base 2")
}

func TestCheckRunsItsFunctionOnlyWhenEnabled(t *testing.T) {
	cause := errors.New("hole at 7")
	called := false
	v := caught(func() {
		invariant.Check(func() error { called = true; return cause }, "offsets of %s", "p0")
	})
	assert.Equal(t, invariant.Enabled, called)
	if invariant.Enabled {
		require.NotNil(t, v)
		assert.ErrorIs(t, v, cause)
		assert.EqualError(t, v, "invariant violated: offsets of p0: hole at 7")
	}
}

func TestTrueClaimsDoNothing(t *testing.T) {
	assert.Nil(t, caught(func() {
		invariant.Assert(true, "never")
		invariant.Check(func() error { return nil }, "never")
	}))
}

func TestAssertDoesNotAllocateForATrueClaim(t *testing.T) {
	assert.Zero(t, testing.AllocsPerRun(100, func() { invariant.Assert(true, "constant") }))
}
