package producerstate

// Kept says what is stored of a producer, for errors that are not this
// package's.
func (s *State) Kept(producerID int64) Kept {
	if p := s.byID[producerID]; p != nil {
		return p.kept()
	}
	return nothingKept
}
