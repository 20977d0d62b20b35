// Package lifecycle runs a service's named tasks and stops them in order.
//
// A [Group] is assembled first and run once. Tasks start behind a barrier:
// none runs before [Group.Run] has started them all, so none meets a
// half-wired service. The group runs until its context ends (a signal), a task
// fails, or all tasks are done; then it stops.
//
// Stopping is a list of named steps, done one after the other in the order in
// which they were added. Each step has a bound: when it is over, the step's
// context ends, and a step that doesn't return even then is left behind,
// named in the log and in the error of Run, and the next step begins. Steps get a context
// that outlives the one given to Run, since that has ended. Tasks end in the
// step that names them ([Group.StopTasks]), or after the last step. Each step
// is logged once, with its duration.
//
// [Signals] gives a main its context: the first SIGINT or SIGTERM ends it, the
// second exits the process at once.
package lifecycle
