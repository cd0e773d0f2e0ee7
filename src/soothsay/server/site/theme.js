// Sets the colours before the first paint, so that the page does not flash. Not a module, since modules run too late.
{
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
