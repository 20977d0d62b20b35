package sim
import ("testing";"fmt")
func TestDbg(t *testing.T){
	w := newWorld(642)
	for range simSteps { w.random() }
	w.heal()
	w.check()
	p := w.partition()
	fmt.Println(p.GetLeaderId(), p.GetFence(), p.GetOpened(), p.GetObjectEndOffset(), p.GetLineage())
	for _,h := range w.hosts[1:] { v,k := h.m.View(); s,r := h.m.State(); fmt.Printf("%d epoch %d %v %q view %+v %v\n", h.id,h.epoch, s,r, v,k); fmt.Println(h.disk.lineage, h.disk.end(), len(h.watch)); fmt.Println(h.m.Wanted()) }
	fmt.Println(w.bad)
}
