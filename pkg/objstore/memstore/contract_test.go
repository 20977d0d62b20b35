package memstore_test

import (
	"testing"

	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/memstore"
	"github.com/braidlog/braid/pkg/objstore/objstoretest"
)

func TestContract(t *testing.T) {
	objstoretest.Run(t, func(*testing.T) objstore.Store { return memstore.New(memstore.Options{}) })
}
